package containerd

import (
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/reason"
)

// pullEvent reports that an image is pulled: dag.Handle.EventOf.
type pullEvent func(code reason.Code, message string)

// Why an image isn't there.
const (
	Pulling            reason.Code = "ImagePulling" // it is under way
	ImageNoSpace       reason.Code = "ImageNoSpace"
	RegistryDenied     reason.Code = "RegistryDenied"
	RegistryUntrusted  reason.Code = "RegistryUntrusted"
	RegistryUnresolved reason.Code = "RegistryUnresolved"
	RegistryNoRoute    reason.Code = "RegistryNoRoute"
	RegistryUnanswered reason.Code = "RegistryUnanswered"
	RegistryPlainHTTP  reason.Code = "RegistryPlainHTTP"
	RegistryLimits     reason.Code = "RegistryLimits"
	ImageNotFound      reason.Code = "ImageNotFound"
	ImageUnsigned      reason.Code = "ImageUnsigned"
	ImageNameInvalid   reason.Code = "ImageNameInvalid"
	ImagePullFailed    reason.Code = "ImagePullFailed" // for another reason
)

// pullWords are how containerd and registries say it, the surest first. What containerd
// does itself comes over gRPC, and what it pulls for pods through the kubelet, so that
// there is nothing but its text.
var pullWords = []pullWord{
	{ImageUnsigned, []string{"isn't signed as machine.images.verify demands"}},
	{ImageNoSpace, []string{syscall.ENOSPC.Error()}},
	{RegistryDenied, []string{"401 Unauthorized", "403 Forbidden", "authorization failed", "authentication required", "pull access denied", "insufficient_scope"}},
	{RegistryUntrusted, []string{"x509:", "certificate"}},
	{RegistryUnresolved, []string{"dial tcp: lookup ", "no such host", "server misbehaving"}},
	{RegistryNoRoute, []string{syscall.ENETUNREACH.Error()}},
	{RegistryUnanswered, []string{"connection refused", "i/o timeout", "no route to host", "context deadline exceeded", "EOF", "connection reset"}},
	{RegistryPlainHTTP, []string{"server gave HTTP response to HTTPS client"}},
	{ImageNotFound, []string{"not found", "manifest unknown", "404"}},
	{ImageNameInvalid, []string{"invalid reference", "InvalidImageName", "couldn't parse image"}},
	{RegistryLimits, []string{"toomanyrequests", "429"}},
}

type pullWord struct {
	code  reason.Code
	words []string
}

// PullReason is why an image can't be had, by containerd's text.
func PullReason(text string) reason.Code {
	for _, r := range pullWords {
		if slices.ContainsFunc(r.words, func(word string) bool { return strings.Contains(text, word) }) {
			return r.code
		}
	}
	return ImagePullFailed
}

// IsPullReason says whether a code is one of PullReason.
func IsPullReason(code reason.Code) bool {
	return code == ImagePullFailed || slices.ContainsFunc(pullWords, func(w pullWord) bool { return w.code == code })
}

// pullError adds the reason, and what a person can do about it.
func pullError(ref string, err error) error {
	code := PullReason(err.Error())
	if code != ImageNoSpace {
		return reason.With(code, fmt.Errorf("pull image %s (mirrors are in machine.registries.mirrors): %w", ref, err))
	}
	size := "its"
	var fs syscall.Statfs_t
	if syscall.Statfs(boot.EphemeralDir, &fs) == nil {
		size = fmt.Sprintf("its %d MiB", int64(fs.Blocks)*fs.Bsize>>20)
	}
	return reason.With(code, fmt.Errorf("the disk is full: %s (EPHEMERAL) has no room in %s for image %s; remove what fills it, or give the machine a larger disk", boot.EphemeralDir, size, ref))
}
