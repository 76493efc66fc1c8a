"""Files: atomic writing, checksums, and safe reading of files from untrusted sources."""
