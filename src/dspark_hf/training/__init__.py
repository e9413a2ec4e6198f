"""Training drafters on one machine: data, anchors, objective, trainer (paper section 6)."""
