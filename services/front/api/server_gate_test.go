package api

import (
	"net/http"
	"os"
	"strconv"
	"testing"

	contract "github.com/garboard-os/garboard/api"
)

// A process that isn't the gate gets no answer, whoever it says that it is; the gate does, again
// and again.
func TestOnlyTheGateMayConnect(t *testing.T) {
	r := newRig(t)
	r.serve()
	get := func() error {
		res, err := r.as(admin).Get(host + contract.MetricsPath)
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	if err := get(); err != nil {
		t.Fatalf("the gate: %v", err)
	}
	for name, pid := range map[string]int64{"another process": int64(os.Getpid()) + 1, "no gate runs": 0} {
		r.opts.Gate.PID.Store(pid)
		if get() == nil {
			t.Errorf("%s: it was answered", name)
		}
	}
	r.opts.Gate.PID.Store(int64(os.Getpid()))
	if err := get(); err != nil {
		t.Errorf("the gate afterwards: %v", err)
	}
}

// A name can't add to the line of the audit log that it is in.
func TestNamesAreOneText(t *testing.T) {
	for _, name := range []string{"jane\noutcome=ok", "jane\x00", "jane\u2028x", "jane\u202ex", "jane\x1b[2J", "jane\xff"} {
		for _, header := range []string{contract.HeaderPeer, contract.HeaderRemote, contract.HeaderRoles} {
			h := http.Header{}
			for k, v := range admin {
				h.Set(k, v)
			}
			h.Set(header, name)
			if _, err := identify(h); err == nil {
				t.Errorf("%s %s was taken", header, strconv.Quote(name))
			}
		}
	}
}
