package client

import (
	"crypto/rand"

	"github.com/garboard-os/garboard/api"
)

// NewRecoveryKey makes a key for encrypted disks, in the form of api.ParseRecoveryKey.
func NewRecoveryKey() string {
	for {
		digits := make([]byte, 64)
		rand.Read(digits) // it never fails
		for i, b := range digits {
			digits[i] = api.Modhex[b&15]
		}
		if key, err := api.ParseRecoveryKey(string(digits)); err == nil {
			return key
		}
	}
}
