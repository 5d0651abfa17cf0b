package boot

import (
	"strings"
	"time"
)

// Version is the release of Garboard. Builds stamp it with the name of their code, in which the day and
// the hash of the commit follow a + (package image/version).
var Version = "v0.1.0-dev"

// Release is a version without that: what releases are ordered by, and called in documents and tags.
func Release(version string) string {
	release, _, _ := strings.Cut(version, "+")
	return release
}

// Named is the text of os-release(5) with this version in place of its release. The root file system has only
// that, as each commit would make another one. Kubernetes shows the result as a node's OS image.
func Named(osRelease string) string {
	return strings.ReplaceAll(osRelease, "("+Release(Version)+")", "("+Version+")")
}

// UpgradesFrom is the oldest release that can be upgraded to this one: its data and its
// configuration are still understood. The -0 is before all that is built on the way to it.
const UpgradesFrom = "v0.1.0-0"

// released is the day of that release, or of the first commit after the last
// one: both are changed together. The clock's floor needs a time that is
// certainly past, and recent enough for certificates to be valid. With the time
// of the build every image would differ.
var released = time.Date(2026, time.November, 21, 0, 0, 0, 0, time.UTC)

// Built is earlier than every build of this release. It is always in the past,
// even if the machine's clock is wrong.
func Built() time.Time { return released }
