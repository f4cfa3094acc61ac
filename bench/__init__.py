"""Measurements of Pando, to be run by hand; nothing in the packages depends on them."""
