"""Starting ranks and watching them: here, under torchrun, or as whole commands."""
