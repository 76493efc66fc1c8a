"""Files: written whole, checked by checksums, read though anybody may have written them."""
