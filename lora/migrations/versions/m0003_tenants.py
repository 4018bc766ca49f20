"""Tenants' weights, limits and keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column(
        "installation", sa.Column("tenants_revision", sa.BigInteger, nullable=False, server_default="0")
    )
    op.add_column("tenants", sa.Column("weight", sa.Double, nullable=False, server_default="1"))
    op.add_column("tenants", sa.Column("limits", sa.JSON, nullable=False, server_default=sa.text("'{}'")))
    op.create_table(
        "keys",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("description", sa.Text),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("last_used_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("sha256", name="uq_keys_sha256"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_keys_tenant_id", "keys", ["tenant_id"])


def downgrade() -> None:
    op.drop_table("keys")
    for table, column in (("tenants", "limits"), ("tenants", "weight"), ("installation", "tenants_revision")):
        with op.batch_alter_table(table) as batch:
            batch.drop_column(column)
