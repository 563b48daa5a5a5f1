"""A stand-in for flash-attn 3 (see ../README.md): `flash_attn_interface`, which is a top-level module too."""
