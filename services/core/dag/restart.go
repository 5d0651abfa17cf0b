package dag

import "time"

// The pause before a restart doubles from RestartFirst to RestartMax.
const (
	// RestartFirst is short, because most failures don't repeat.
	RestartFirst = 500 * time.Millisecond
	// RestartMax is reached after eight failures: it spares the disk and the log, and is short
	// enough for a user who has fixed the cause.
	RestartMax = 2 * time.Minute
	// RestartReset is how long a run must have been in state Running before the
	// pause is short again.
	RestartReset = time.Minute
)
