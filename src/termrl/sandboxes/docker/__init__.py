"""The Docker backend: images, containers and their sweeping. Nothing here imports the ``docker`` SDK by itself."""
