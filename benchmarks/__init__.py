"""Programs that measure; nothing here is imported by what they measure."""
