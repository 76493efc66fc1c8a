"""What a run leaves on the disk: its folder, reading it as it grows, commands in it."""
