#!/bin/sh
# Installs Sightline on Debian or Ubuntu, into /opt/sightline: what docker/Dockerfile runs in both of
# its targets, and CI in a bare Debian tree.
#   docker/install.sh WHAT [EXTRAS]     WHAT: a wheel, a checkout, or sightline-rl
set -eu
what=$1 extras=${2:-train,data,object-store}
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1
apt-get update -q
apt-get install -y -q --no-install-recommends ca-certificates openssh-client python3 python3-venv
rm -rf /var/lib/apt/lists/* /opt/sightline
python3 -m venv /opt/sightline
/opt/sightline/bin/python -m pip install --no-cache-dir "$what[$extras]"
ln -sf /opt/sightline/bin/sightline /usr/local/bin/sightline
sightline --version
