"""What the API process knows of tenants: who they are, their keys, limits and usage."""
