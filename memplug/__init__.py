"""memplug: training memory as cheap as the hardware allows."""
