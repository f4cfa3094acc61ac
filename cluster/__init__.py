"""The operator's view: one configuration tree, the Ray Serve application, the command line."""
