"""Encoded bytes in, square uint8 images out: decode, convert the pixel mode, resize."""
