"""The study bench: decoding methods compared over prompts and data sets. ``specbeam study`` is its command."""
