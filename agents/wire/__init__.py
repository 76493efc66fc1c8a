"""What is sent: models and updates as safetensors, compressed updates, control messages."""
