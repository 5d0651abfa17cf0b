package devcluster

import (
	"strings"
	"testing"
	"time"
)

// What the help says is what is so.
func TestReadyBudgets(t *testing.T) {
	t.Parallel()
	minutes := func(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }
	want := minutes(readyBudget) + " and " + minutes(readyBudgetNode) + " for each further node; " + minutes(readyBudgetEmulated) + " where QEMU emulates"
	if ReadyBudgets != want {
		t.Errorf("%q, not %q", ReadyBudgets, want)
	}
}
