"""Writing drafters in the layouts that other engines serve, with a model card, and to the Hub."""
