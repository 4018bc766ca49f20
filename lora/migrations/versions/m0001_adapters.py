"""Tenants, adapters, their versions and usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "installation",
        sa.Column("id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_installation"),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("public_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("description", sa.Text),
        sa.Column("current", sa.Integer, nullable=False),
        sa.Column("last_number", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("public_id", name="uq_adapters_public_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "versions",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("fingerprint", sa.String(128), nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("target_modules", sa.JSON, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("dtype", sa.String(32), nullable=False),
        sa.Column("max_abs", sa.Double, nullable=False),
        sa.Column("matched", sa.Integer, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("warnings", sa.JSON, nullable=False),
        sa.Column("source", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.UniqueConstraint("adapter_id", "number", name="uq_versions_adapter_id_number"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_versions_adapter_id_adapters", ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_versions_digest", "versions", ["digest"])
    op.create_table(
        "usage",
        sa.Column("version_id", sa.Integer, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("generated_tokens", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version_id", name="pk_usage"),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name="fk_usage_version_id_versions", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    for table in ("usage", "versions", "adapters", "tenants", "installation"):
        op.drop_table(table)
