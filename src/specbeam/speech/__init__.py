"""Speech: sound to text."""
