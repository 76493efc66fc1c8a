"""Messages as bytes: models and updates as safetensors, compressed updates, control messages."""
