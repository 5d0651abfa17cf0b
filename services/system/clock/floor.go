package clock

import (
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// raise sets the clock to at least the time of the build, the time that was saved
// last, and the time from which the cluster's authorities are valid (design, duty
// 5). Before that time no certificate of the cluster is valid, and without a time
// server the node could never join. It returns a description of what it did, or "".
func (d *Daemon) raise() (string, error) {
	floor, why, until, last := d.earliest()
	saved, err := saved(d.o.file)
	if !until.IsZero() && saved.After(until) { // a clock that was wrong once: no certificate would be valid
		err = fmt.Errorf("the saved time %s isn't used: the configuration's authorities are valid until %s", stamp(saved), stamp(until))
		saved = time.Time{}
	}
	if saved.After(floor) {
		floor, why = saved, "that was saved last"
	}
	d.floor, d.fresh = floor, saved.IsZero()
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

// earliest is the time before which it can't be, and why: the time of the build, or the one
// from which the last of the configuration's authorities is valid. The first and the last of
// these end at until and last; both are zero without any. An authority that can't be read is
// ignored: other code reports it.
func (d *Daemon) earliest() (floor time.Time, why string, until, last time.Time) {
	floor, why = d.o.built, "this system was built then"
	cfg, err := configuration.Config(d.o.Store)
	if err != nil {
		return floor, why, until, last
	}
	c := cfg.Cluster
	for _, ca := range []config.CertKey{cfg.Machine.CA, c.CA, c.AggregatorCA, c.Etcd.CA} {
		cert, err := pki.ParseCert(ca.Crt)
		if err != nil {
			continue
		}
		if cert.NotBefore.After(floor) {
			floor, why = cert.NotBefore, fmt.Sprintf("authority %q of the configuration is valid from then on", cert.Subject)
		}
		if until.IsZero() || cert.NotAfter.Before(until) {
			until = cert.NotAfter
		}
		if cert.NotAfter.After(last) {
			last = cert.NotAfter
		}
	}
	return floor, why, until, last
}

// Floor is a time that is over for certain, also before the service has begun.
func Floor(r resource.Reader) time.Time {
	if o, err := Statuses.Get(r, StatusID); err == nil {
		return o.Spec.Floor
	}
	t, _ := saved(boot.ClockFile) // the service reports an error
	return t
}

// saved is the zero time if nothing was saved.
func saved(file string) (time.Time, error) {
	return boot.Kept(file, func(text string) (time.Time, error) { return time.Parse(time.RFC3339, text) })
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
