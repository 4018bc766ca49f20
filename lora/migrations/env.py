"""Run by Alembic: applies the migrations over the connection that `database.upgrade` hands in."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
