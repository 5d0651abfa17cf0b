package clock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/system/machine"
)

// raise sets the clock to at least the time of the build, the time that was saved
// last, and the time from which the cluster's authorities are valid (design, duty
// 5). Before that time no certificate of the cluster is valid, and without a time
// server the node could never join. It returns a description of what it did, or "".
func (d *Daemon) raise() (string, error) {
	floor, why := d.o.built, "this system was built then"
	made, name, until, last := d.authorities()
	saved, err := d.saved()
	if !until.IsZero() && saved.After(until) { // a clock that was wrong once: no certificate would be valid
		err = fmt.Errorf("the saved time %s isn't used: the configuration's authorities are valid until %s", stamp(saved), stamp(until))
	} else if saved.After(floor) {
		floor, why = saved, "that was saved last"
	}
	if made.After(floor) {
		floor, why = made, fmt.Sprintf("authority %q of the configuration is valid from then on", name)
	}
	now := d.o.kernel.Now()
	late := !last.IsZero() && now.After(last) && floor.Before(last) // not where one of them has really ended
	if late {
		why += fmt.Sprintf(", and the configuration's authorities are valid until %s", stamp(last))
	}
	if !now.Before(floor) && !late {
		return "", err
	}
	if setErr := d.o.kernel.Set(floor); setErr != nil {
		return "", errors.Join(err, setErr)
	}
	d.raised = true
	return fmt.Sprintf("the clock was at %s, and is put to %s: %s", stamp(now), stamp(floor), why), err
}

// authorities is when the last of the configuration's authorities was made, and
// its name, and when the first and the last of them end. An authority that can't be read is
// ignored: other code reports it.
func (d *Daemon) authorities() (made time.Time, name string, until, last time.Time) {
	cfg, err := machine.Config(d.o.Store)
	if err != nil {
		return made, "", until, last
	}
	c := cfg.Cluster
	for _, ca := range []config.CertKey{cfg.Machine.CA, c.CA, c.AggregatorCA, c.Etcd.CA} {
		cert, err := pki.ParseCert(ca.Crt)
		if err != nil {
			continue
		}
		if cert.NotBefore.After(made) {
			made, name = cert.NotBefore, cert.Subject.String()
		}
		if until.IsZero() || cert.NotAfter.Before(until) {
			until = cert.NotAfter
		}
		if cert.NotAfter.After(last) {
			last = cert.NotAfter
		}
	}
	return made, name, until, last
}

// saved is the zero time if nothing was saved.
func (d *Daemon) saved() (time.Time, error) {
	data, err := os.ReadFile(d.o.file)
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("saved time: %w", err)
	}
	t, err := time.Parse(time.RFC3339, strings.TrimSpace(string(data)))
	if err != nil {
		return time.Time{}, fmt.Errorf("saved time in %s: %w", d.o.file, err)
	}
	return t, nil
}

func (d *Daemon) save() error {
	if err := boot.WriteFile(d.o.file, []byte(stamp(d.o.kernel.Now())+"\n"), 0o644); err != nil {
		return fmt.Errorf("save the time: %w", err)
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
