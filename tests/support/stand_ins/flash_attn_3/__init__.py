"""A stand-in of flash-attn 3 (see ../README.md): `flash_attn_interface`, which is a module of its own too."""
