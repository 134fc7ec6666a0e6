#error "dsengine includes core/check.h of the program"
