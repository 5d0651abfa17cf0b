package boot

import (
	"strconv"
	"time"
)

// BuildTime is when the image was built, in seconds since 1970, as the image
// build stamps it: -X github.com/garboard-os/garboard/boot.BuildTime=1767225600.
// It can't be later than now, whatever the machine's clock says.
var BuildTime string

// Built is BuildTime as a time; zero where nothing was stamped.
func Built() time.Time {
	seconds, err := strconv.ParseInt(BuildTime, 10, 64)
	if err != nil || seconds <= 0 {
		return time.Time{}
	}
	return time.Unix(seconds, 0)
}
