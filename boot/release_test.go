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

// The text of the system names the build; that of somebody who has changed it stays. (S-307)
func TestNamed(t *testing.T) {
	was := Version
	t.Cleanup(func() { Version = was })
	Version = "v1.2.3+20261130.abc"
	for text, want := range map[string]string{
		"ID=garboard\nPRETTY_NAME=\"Garboard (v1.2.3)\"\n": "ID=garboard\nPRETTY_NAME=\"Garboard (v1.2.3+20261130.abc)\"\n",
		"PRETTY_NAME=\"Ours\"\n":                           "PRETTY_NAME=\"Ours\"\n",
	} {
		if got := Named(text); got != want {
			t.Errorf("%q", got)
		}
	}
}
