"""What each tenant used, in all and by adapter."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def _counters() -> list[sa.Column[int]]:
    names = ("requests", "prompt_tokens", "generated_tokens", "cached_tokens")
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def upgrade() -> None:
    op.create_table(
        "tenant_usage",
        sa.Column("tenant_id", sa.Integer, nullable=False),
        *_counters(),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenant_usage"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_tenant_usage_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "tenant_adapter_usage",
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("adapter", sa.String(128), nullable=False),
        *_counters(),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "owner", "adapter", name="pk_tenant_adapter_usage"),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name="fk_tenant_adapter_usage_tenant_id_tenants",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("tenant_adapter_usage")
    op.drop_table("tenant_usage")
