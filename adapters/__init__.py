"""The demo adapters: three small LoRAs for the demo base, and the scripts that train and judge them."""
