package etcd

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Members that don't answer for a short time are counted again, until patience
// is over; other refusals aren't repeated.
func TestSettle(t *testing.T) {
	t.Parallel()
	other := errors.New("nobody can be asked")
	for name, tt := range map[string]struct {
		patience, silent time.Duration
		then             error
		err              error
		took             time.Duration // at most
	}{
		"at once":        {patience: SettleTimeout},
		"soon":           {patience: SettleTimeout, silent: SettleTimeout / 2, took: SettleTimeout},
		"too late":       {patience: SettleTimeout, silent: time.Hour, err: ErrQuorum, took: SettleTimeout + promoteRetry},
		"who plans":      {silent: time.Hour, err: ErrQuorum},
		"another reason": {patience: SettleTimeout, then: other, err: other},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				err := settle(t.Context(), tt.patience, func(context.Context) error {
					if time.Since(began) < tt.silent {
						return ErrQuorum
					}
					return tt.then
				})
				if took := time.Since(began); !errors.Is(err, tt.err) || took > tt.took {
					t.Errorf("%v after %s", err, took)
				}
			})
		})
	}
}
