"""A counter of the registry's changes, for the servers that share it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("installation", sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("installation") as table:
        table.drop_column("revision")
