"""Drafts without a model: by looking up how a text may go on."""
