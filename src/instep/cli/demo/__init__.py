"""`instep demo`: trains a small language model on all devices and compares it with one device."""
