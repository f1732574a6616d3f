"""What image classifiers share: images, configurations, the task."""
