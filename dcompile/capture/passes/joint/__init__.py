"""Rewrites of the joint, forward and backward graphs."""
