package boot

import "time"

// Version is the release of Garboard; the image build stamps it.
var Version = "v0.1.0-dev"

// released is the day of that release, or of the first commit towards it: who
// changes Version changes both. The clock's floor needs no more than a time that
// is surely past, and close enough for certificates to make sense. The time of
// the build would make every image another one, and that of the last commit would
// build PID 1 anew after each.
var released = time.Date(2026, time.November, 21, 0, 0, 0, 0, time.UTC)

// Built is a time that every build of this release is later than. It can't be
// later than now, whatever the machine's clock says.
func Built() time.Time { return released }
