"""One program for a backward and the optimizer's update, in the user's own loop."""
