"""What the target is asked, so that a draft can learn from its answers."""
