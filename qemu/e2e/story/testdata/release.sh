#!/usr/bin/env bash
# Who makes a release, as docs/releasing.md says.
#
#	qemu/e2e/story/testdata/release.sh REPOSITORY EMPTY-DIRECTORY NAME
#
# NAME.key and NAME.pub are the key, of gbctl gen release-key. The release is in EMPTY-DIRECTORY/garboard/out/release.
here=$(cd "$(dirname "$0")" && pwd)
. "$here/story.sh"
cd "$2"

step 'Make a release'
typed "git clone $1 garboard"
typed 'cd garboard'
typed 'git tag v1.2.3'
typed "GARBOARD_RELEASE_KEY=$3.key make release VERSION=v1.2.3"

step 'Check it'
typed "make release-check DIR=out/release KEYS=$3.pub"
typed 'cd out/release'
typed "openssl pkeyutl -verify -pubin -inkey $3.pub -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig"
typed 'sha256sum --check --quiet SHA256SUMS'
