"""Parts of models: attention and its masks, blocks, stacks, and the kinds of attention by name."""
