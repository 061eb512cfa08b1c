"""`instep demo`: a small language model, trained on every device and proved against one."""
