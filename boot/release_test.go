package boot

import (
	"testing"
	"time"
)

// A floor in the future would set the clocks of all nodes wrong.
func TestReleasedIsPast(t *testing.T) {
	if now := time.Now(); Built().After(now) {
		t.Errorf("released on %s, and it is %s", Built(), now)
	}
}
