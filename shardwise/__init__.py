"""One large language model on any number of devices: any layout, one answer."""
