"""Programs that measure this project. Nothing here is imported by lenet, service or trainer."""
