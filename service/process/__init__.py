"""The process: its signals, files and memory."""
