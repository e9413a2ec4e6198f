"""Accepted length, speed and calibration of drafters on prompt sets, and reports of them."""
