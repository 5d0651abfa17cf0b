package boot

import "time"

// Version is the release of Garboard; the image build stamps it.
var Version = "v0.1.0-dev"

// UpgradesFrom is the oldest release that can be upgraded to this one: its data and its
// configuration are still understood. The -0 is before all that is built on the way to it.
const UpgradesFrom = "v0.1.0-0"

// released is the day of that release, or of the first commit after the last
// one: both are changed together. The clock's floor needs a time that is
// certainly past, and recent enough for certificates to be valid. With the time
// of the build every image would differ, and with that of the last commit each
// commit would rebuild PID 1.
var released = time.Date(2026, time.November, 21, 0, 0, 0, 0, time.UTC)

// Built is earlier than every build of this release. It is always in the past,
// even if the machine's clock is wrong.
func Built() time.Time { return released }
