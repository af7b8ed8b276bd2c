"""The process: its signals, files, listeners and memory."""
