"""Training a small draft from a target: prompts, the target's answers, training, evaluation, and the draft's files."""
