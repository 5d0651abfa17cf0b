package reason

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
)

func TestOf(t *testing.T) {
	_, unresolved := net.DefaultResolver.LookupHost(context.Background(), "reason.garboard.invalid")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	_, noSpace := full.WriteString("x")
	own := With("Own", errors.New("text"))
	for _, c := range []struct {
		err  error
		want Code
	}{
		{nil, ""}, {errors.New("no space left on device"), ""},
		{fmt.Errorf("a: %w", errors.Join(errors.New("b"), own)), "Own"}, {With("Outer", own), "Outer"},
		{fmt.Errorf("a: %w", unresolved), NameUnresolved}, {noSpace, NoSpace},
	} {
		if got := Of(c.err); got != c.want {
			t.Errorf("%v: %q, want %q", c.err, got, c.want)
		}
	}
	if own.Error() != "text" {
		t.Error(own)
	}
}
